"""FP8 KV for MLA models on stock SGLang, without the cast of the whole pool.

Importing the package loads nothing but the standard library; `plugin.register` is SGLang's way in.
"""

BACKEND_NAME = "flashinfer_mla_fp8"
__version__ = "0.1.0"
