"""The rollout side: what a worker does with a payload. It knows nothing of trainers, engines or HTTP servers."""
