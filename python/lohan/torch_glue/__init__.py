"""lohan's interface to torch: tensors, parameters, buffers, devices, compilation, threads."""
