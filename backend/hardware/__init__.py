"""What the machine has: memory of GPUs and host, limits of containers, kernels, other programs on a GPU."""
