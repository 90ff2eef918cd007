"""The page at ``/``: what the server does right now, and a box to try it; nothing comes from elsewhere."""

from __future__ import annotations

import html
import json
import secrets
from importlib.resources import files
from string import Template

from starlette.responses import HTMLResponse

from oscar_serving.server.state import ServerState
from oscar_serving.version import __version__

_FOLDER = files("oscar_serving.server") / "page"


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


_PAGE = Template(_read("page.html"))
_STYLE, _SCRIPT = _read("style.css"), _read("script.js")


def page(state: ServerState) -> HTMLResponse:
    """The dashboard of this server; its policy lets only its own style and script run."""
    engine, name = state.engine, state.names[0]
    config = engine.config
    facts = [f"{engine.options.kv_cache_dtype} cache"]
    if config is not None and engine.artifact is not None:  # not the plain baseline
        facts += [
            f"K {config.k_bits} bits, V {config.v_bits} bits",
            f"first {config.sink} and last {config.recent} tokens unquantized",
            f"artifact {engine.artifact.fingerprint[:12]}",
        ]
    facts += [
        f"context {engine.max_model_len} tokens",
        f"{engine.backend.name} kernels on {engine.device}",
        f"oscar-serving {__version__}",
    ]
    nonce = secrets.token_urlsafe(16)
    text = _PAGE.substitute(
        title=html.escape(f"{name} · OSCAR Serving"),
        model=html.escape(name),
        facts=html.escape(" · ".join(facts)),
        nonce=nonce,
        style=_STYLE,
        # In a script element only "</" and "<!" could end the text; JSON may write them escaped.
        info=json.dumps({"model": name}).replace("<", "\\u003c"),
        script=_SCRIPT,
    )
    policy = (
        f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return HTMLResponse(text, headers=headers)
