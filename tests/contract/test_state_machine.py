"""The backend against a float64 model of a serving engine, operation by operation, on the CPU."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import pytest

pytest.importorskip("sglang")
hypothesis = pytest.importorskip("hypothesis")

from contract.arms import OURS, arm  # noqa: E402
from contract.cpu_sglang import hopper  # noqa: E402
from contract.machine import WEIGHTS, Machine  # noqa: E402
from contract.scene import Scene, Shape  # noqa: E402
from hypothesis import HealthCheck, Phase, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Serving(RuleBasedStateMachine):
    """Hypothesis picks the operations and everything inside them."""

    path: ClassVar[str] = "gather_cast"
    machine: Machine
    last: str

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.data: Any = None

    @initialize(page_size=st.sampled_from([16, 4, 1]), graphs=st.booleans(), data=st.data())
    def build(self, page_size: int, graphs: bool, data: Any) -> None:
        self.stack.enter_context(hopper())
        name = self.stack.enter_context(arm(self.path))
        assert name == OURS
        shape = Shape(heads=4, page_size=page_size, slots=160, max_bs=6, max_context=64, layers=2)
        scene = Scene(name, shape)
        if self.path == "mixed":
            assert scene.backend.decision.decode.paths == ("fused", "native", "gather_cast")
        self.machine = Machine(scene, self.pick, (1, 4) if graphs else ())
        self.last = ""
        self.data = data
        for _ in range(2):
            self.machine.do("start")

    def may(self, operation: str) -> bool:
        """Keep a server busy: no two idle steps in a row, and no fewer than two requests."""
        quiet = operation == "idle" and self.last == "idle"
        drain = operation in ("finish", "abort") and len(self.machine.live) <= 2
        return not quiet and not drain and self.machine.may(operation)

    def pick(self, low: int, high: int) -> int:
        value: int = self.data.draw(st.integers(low, high))
        return value

    def teardown(self) -> None:
        self.stack.close()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "machine"):
            self.machine.check_pool()


def make_rule(operation: str) -> Any:
    def run(self: Serving, data: Any) -> None:
        self.data, self.last = data, operation
        self.machine.do(operation)

    run.__name__ = operation
    may = precondition(lambda self: hasattr(self, "machine") and self.may(operation))
    return may(rule(data=st.data())(run))


# hypothesis picks among rules evenly, so a frequent operation is several rules
for _operation, _weight in WEIGHTS.items():
    for _copy in range(_weight):
        setattr(Serving, f"{_operation}_{_copy}", make_rule(_operation))


# of 30 steps each; native has no interpreted kernel and is quick
EXAMPLES = {"gather_cast": 6, "native": 12, "fused": 4, "mixed": 5}


@pytest.mark.parametrize("path", EXAMPLES)
def test_serves_like_the_model(path: str) -> None:
    """Allocate, extend, decode, replay, share, fork, speculate, finish, abort, evict, reuse."""
    machine = type(f"Serving_{path}", (Serving,), {"path": path})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES[path],
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            # to shrink interpreted kernels takes minutes; the report has the operations
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
