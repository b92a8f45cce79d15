"""The packages that NIXL comes in, one for each library of a device's maker."""

NIXL_FLAVOURS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")  # as nixl itself prefers them; all are alike for host memory
