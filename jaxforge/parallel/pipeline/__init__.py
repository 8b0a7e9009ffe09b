"""Pipeline parallelism: which stage holds which layers, the 1F1B schedule as tables, and the buffers it needs."""
