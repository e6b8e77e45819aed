"""Mini PCs and servers: AVX2 is certain (the runtime needs it), storage is an SSD or better."""

ttft_budget_ms = 1500
load_deadline_s = 120
