"""Random steps against a model that knows what was written to every slot."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from oscar_serving.config import OscarConfig

from .simulator import Simulator
from .workload import prompt

PROMPTS = st.builds(prompt, st.integers(0, 2), st.sampled_from([16, 32, 48, 80]), st.integers(0, 140))
SALTS = st.sampled_from(["", "", "adapter"])
LEFT = Bundle("left")


class PoolMachine(RuleBasedStateMachine):
    """All calls in any order, on pools small enough that they are always short of pages."""

    #: Preempted or finished requests, which may come back, alone or with more tokens.
    left = LEFT

    @initialize(
        sink=st.sampled_from([0, 16, 24, 40, 2**31 - 1]),
        recent=st.sampled_from([1, 16, 17, 33, 48]),
        pages=st.integers(2, 40),
        window_pages=st.integers(2, 30),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, sink: int, recent: int, pages: int, window_pages: int, prefix_caching: bool) -> None:
        config = OscarConfig(sink=sink, recent=recent, page_size=16)
        self.simulator = Simulator(config, pages=pages, window_pages=window_pages, prefix_caching=prefix_caching)
        self.admitted = 0

    def _name(self) -> str:
        self.admitted += 1
        return f"request-{self.admitted}"

    def _choose(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.simulator.running)))

    def _some(self) -> bool:
        return bool(self.simulator.running)

    def _few(self) -> bool:
        return len(self.simulator.running) < 5

    @precondition(_few)
    @rule(tokens=PROMPTS, salt=SALTS)
    def admit(self, tokens: list[int], salt: str) -> None:
        self.simulator.admit(self._name(), tokens, salt)

    @precondition(_few)
    @rule(again=consumes(LEFT), more=st.integers(0, 20))
    def admit_again(self, again: tuple[list[int], str], more: int) -> None:
        tokens, salt = again
        self.simulator.admit(self._name(), [*tokens, *[7] * more], salt)

    @precondition(_some)
    @rule(data=st.data(), generated=st.integers(0, 1))
    def decode(self, data: st.DataObject, generated: int) -> None:
        self.simulator.step(self._choose(data), 1, generated)

    @precondition(_some)
    @rule(data=st.data(), count=st.integers(1, 70), abandoned=st.sampled_from([0, 0, 0, 1, 30]))
    def chunk(self, data: st.DataObject, count: int, abandoned: int) -> None:
        name = self._choose(data)
        request = self.simulator.running[name]
        left = len(request.tokens) - request.computed
        self.simulator.step(name, min(count, left) or count, abandoned=abandoned)

    @precondition(lambda self: self._some() and self._few())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.simulator.fork(self._choose(data), self._name())

    @precondition(_some)
    @rule(target=LEFT, data=st.data())
    def finish(self, data: st.DataObject) -> tuple[list[int], str]:
        name = self._choose(data)
        request = self.simulator.running[name]
        self.simulator.finish(name)
        return request.tokens, request.salt

    @precondition(_some)
    @rule(target=LEFT, data=st.data())
    def fail(self, data: st.DataObject) -> tuple[list[int], str]:
        name = self._choose(data)
        request = self.simulator.running[name]
        self.simulator.finish(name, keep=False)
        return request.tokens, request.salt

    @precondition(_some)
    @rule(target=LEFT, data=st.data())
    def preempt(self, data: st.DataObject) -> tuple[list[int], str]:
        request = self.simulator.preempt(self._choose(data))
        return request.tokens, request.salt

    @rule()
    def fill(self) -> None:
        """One request takes all that is left, so that what is cached is evicted."""
        name = self._name()
        self.simulator.admit(name, [])
        while self.simulator.step(name, 16, generated=9):
            pass
        self.simulator.finish(name)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "simulator"):
            self.simulator.check()

    def teardown(self) -> None:
        if not hasattr(self, "simulator"):
            return
        for name in list(self.simulator.running):
            self.simulator.finish(name)
        self.simulator.check()
        stats = self.simulator.pool.stats()
        assert stats.quantized.used == stats.windows.used == 0, "pages leaked"


PoolMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPoolMachine = PoolMachine.TestCase
