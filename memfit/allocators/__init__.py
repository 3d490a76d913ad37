"""Simulates PyTorch's CUDA caching allocator without a device, to tell what a sequence of allocations reserves.

`settings` reads PYTORCH_ALLOC_CONF. `caching` is the allocator, built on `blocks`, `driver`, `expandable`, `release`, `streams`
and `private`. `snapshot` reads what torch recorded on a device, and `replay` compares the two.

Not covered: scratch memory that bypasses the allocator, the CUDA context, other libraries; backend:cudaMallocAsync;
pools used only when memory runs out (`use_on_oom`); `throw_on_cudamalloc_oom`; `graph_capture_record_stream_reuse`.
"""
