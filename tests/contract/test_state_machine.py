"""The backend against a float64 model of a serving engine, operation by operation, on the CPU."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import pytest

pytest.importorskip("sglang")
hypothesis = pytest.importorskip("hypothesis")

from contract.arms import OURS, arm  # noqa: E402
from contract.cpu_sglang import hopper  # noqa: E402
from contract.machine import Machine  # noqa: E402
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

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.data: Any = None

    @initialize(page_size=st.sampled_from([1, 4, 16]), graphs=st.booleans())
    def build(self, page_size: int, graphs: bool) -> None:
        self.stack.enter_context(hopper())
        name = self.stack.enter_context(arm(self.path))
        assert name == OURS
        shape = Shape(heads=4, page_size=page_size, slots=160, max_bs=6, max_context=64, layers=2)
        scene = Scene(name, shape)
        self.machine = Machine(scene, self.pick, (1, 4) if graphs else ())

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
        self.data = data
        self.machine.do(operation)

    run.__name__ = operation
    may = precondition(lambda self: hasattr(self, "machine") and self.machine.may(operation))
    return may(rule(data=st.data())(run))


for _operation in Machine.GUARDS:
    setattr(Serving, _operation, make_rule(_operation))


@pytest.mark.parametrize("path", ["gather_cast", "native", "fused"])
def test_serves_like_the_model(path: str) -> None:
    """Allocate, extend, decode, replay, share, fork, speculate, finish, abort, evict, reuse."""
    machine = type(f"Serving_{path}", (Serving,), {"path": path})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=5,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            # to shrink interpreted kernels takes minutes; the report has the operations
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
