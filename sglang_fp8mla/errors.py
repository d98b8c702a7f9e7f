"""The package's exceptions: bad arguments and unfit environments; anything else is a bug."""


class Fp8MlaError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidArgument(Fp8MlaError, ValueError):
    """A shape, dtype, stride or setting breaks the contract that the message states."""


class IncompatibleEnvironment(Fp8MlaError, RuntimeError):
    """This SGLang, FlashInfer, GPU or model cannot run the backend; the message says why."""
