"""The backend against the float64 model of a serving engine, on a GPU: thousands of steps.

Real kernels and real CUDA graphs; the choices come from a seeded generator.
"""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from contract.arms import OURS, arm  # noqa: E402
from contract.machine import Machine, drive  # noqa: E402
from contract.scene import Scene, Shape  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

# of each of sixteen arrangements: 2,000 a path
STEPS = 500


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(
    "path",
    [
        "gather_cast",
        "fused",
        pytest.param("native", marks=pytest.mark.sm90),
        pytest.param("mixed", marks=pytest.mark.sm90),
    ],
)
def test_serves_like_the_model(path: str, page_size: int, graphs: bool) -> None:
    """Half of the steps at 16 heads, half at 20, which need padding in extend."""
    for heads in (16, 20):
        with arm(path) as name:
            assert name == OURS
            shape = Shape(
                heads=heads,
                page_size=page_size,
                slots=4096,
                max_bs=16,
                max_context=512,
                layers=2,
            )
            scene = Scene(name, shape, "cuda")
            machine = Machine(scene, random.Random(heads).randint, (1, 4, 16) if graphs else ())
            done = drive(machine, STEPS // 2)
        rare = [name for name, count in done.items() if count == 0]
        assert rare in ([], ["replay"]), done
        print(f"{path} page {page_size} heads {heads} graphs {graphs}: {done}")
