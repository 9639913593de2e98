"""What lohan knows about torch: tensors, parameters, buffers, devices, compilation, threads."""
