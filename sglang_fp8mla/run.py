"""`python -m sglang_fp8mla.run MODULE ARGS...`: run an SGLang module with the plugins loaded first.

Some modules (`sglang.benchmark.one_batch`, `offline_throughput`, `one_batch_server`) parse their
arguments before SGLang loads plugins, or never load them, in worker processes too. This loads
them in this process and in every process that it spawns, then runs MODULE as `python -m` would.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import types
from typing import Any

from . import BACKEND_NAME
from .errors import IncompatibleEnvironment, InvalidArgument

# how a spawned worker learns what to run; not an option, hence no SGLANG_FP8MLA_ name
_MODULE_VARIABLE = "_SGLANG_FP8MLA_RUN_MODULE"


def main(argv: list[str] | None = None) -> None:
    """Load SGLang's plugins, make sure that ours is among them, run the module."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_fp8mla.run",
        description="Run an SGLang module with SGLang's plugins loaded before it parses arguments.",
    )
    parser.add_argument("module", metavar="MODULE", help="for example sglang.benchmark.one_batch")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    options = parser.parse_args(argv)
    try:
        require_plugin()
        sys.argv = [options.module, *options.args]
        os.environ[_MODULE_VARIABLE] = options.module
        main_module = types.ModuleType("__main__")
        sys.modules["__main__"] = main_module
        run_in(main_module.__dict__, options.module)
    except (IncompatibleEnvironment, InvalidArgument) as error:
        sys.exit(str(error))


def require_plugin() -> None:
    """Load SGLang's plugins and check that our name is now ours.

    Raises:
        IncompatibleEnvironment: SGLang is missing, or did not load this plugin; it says why.
    """
    try:
        from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins
    except ImportError as error:
        raise IncompatibleEnvironment(
            f"run: sglang must be importable, got {error}; pip install 'sglang-fp8mla[sglang]'"
        ) from error
    load_plugins()
    from .integration import name_owner, require_name_free

    require_name_free()
    if name_owner() is not None:
        return
    from importlib.metadata import entry_points

    allowed = os.environ.get("SGLANG_PLUGINS")
    if BACKEND_NAME not in entry_points(group=GENERAL_PLUGINS_GROUP).names:
        why = (
            f"no installed package has the entry point {BACKEND_NAME!r}: pip install sglang-fp8mla"
        )
    elif allowed and BACKEND_NAME not in {name.strip() for name in allowed.split(",")}:
        why = f"SGLANG_PLUGINS={allowed!r} leaves it out: add {BACKEND_NAME!r} to it, or unset it"
    else:
        why = "SGLang's log above says why it failed to load it"
    raise IncompatibleEnvironment(f"run: plugin {BACKEND_NAME!r} must be loaded, but {why}")


def run_in(namespace: dict[str, Any], module: str) -> None:
    """Execute `module` in `namespace`, whose `__name__` stands.

    Its `__spec__` becomes this file's: multiprocessing starts a spawned worker by running the
    module that the spec of `__main__` names, and only this one loads plugins there.

    Raises:
        InvalidArgument: there is no such module.
    """
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except ModuleNotFoundError as error:
        raise InvalidArgument(f"run: MODULE must be importable, got {module!r}: {error}") from error
    get_code = getattr(spec.loader, "get_code", None) if spec else None
    code = get_code(spec.name) if spec and get_code else None
    if spec is None or code is None:
        raise InvalidArgument(f"run: MODULE must be a module with code, got {module!r}")
    namespace.update(
        __file__=spec.origin,
        __package__=spec.parent,
        __loader__=spec.loader,
        __spec__=importlib.util.find_spec("sglang_fp8mla.run"),
    )
    exec(code, namespace)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and _MODULE_VARIABLE in os.environ:
    # in a spawned worker: plugins first, then the functions that the parent pickled by name
    require_plugin()
    run_in(globals(), os.environ[_MODULE_VARIABLE])
