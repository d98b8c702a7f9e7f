"""SGLang's way in: `register` makes the name valid, `create_backend` builds the backend.

`register` runs in every process that loads plugins, before arguments are parsed, and SGLang
swallows what it raises; so it does little, and every refusal waits for `create_backend`, which
SGLang calls only for users of our name and whose errors reach them.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make `--attention-backend flashinfer_mla_fp8` valid. Idempotent; touches no GPU.

    Raises:
        IncompatibleEnvironment: another package holds the name (SGLang logs it and goes on).
    """
    from .integration import install

    install()


def create_backend(runner: Any) -> Any:
    """Build the attention backend for `runner`, SGLang's ModelRunner.

    A runner that is not MLA (an EAGLE3 draft inherits the name) gets stock `flashinfer`.

    Raises:
        IncompatibleEnvironment: SGLang, FlashInfer, the GPU, the model or the memory do not fit;
            the message lists every failed check and its remedy.
        InvalidArgument: an environment variable of the package has a bad name or value.
    """
    from .compat import require_environment
    from .envs import read

    settings = read()
    require_environment()

    from .integration import install_late

    install_late()

    from .backend import create

    return create(runner, settings)
