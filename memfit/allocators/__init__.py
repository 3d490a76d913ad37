"""What a device's caching allocator makes of a course of allocations, by its own rules, without a device.

`settings` reads PYTORCH_ALLOC_CONF; `caching` is the allocator, over `blocks`, `driver`, `expandable`, `release`, `streams`
and `private`; `snapshot` reads what torch recorded on a device, `replay` holds the two against each other.

Not covered: scratch that never passes through the allocator, the CUDA context, other libraries; backend:cudaMallocAsync;
pools used only when memory runs out (`use_on_oom`); `throw_on_cudamalloc_oom`; `graph_capture_record_stream_reuse`.
"""
