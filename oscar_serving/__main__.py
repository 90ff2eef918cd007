"""``python -m oscar_serving`` is the ``oscar`` command."""

from oscar_serving.cli import main

main()
