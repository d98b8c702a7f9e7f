"""The package's own GPU kernels; nothing here imports sglang or flashinfer."""
