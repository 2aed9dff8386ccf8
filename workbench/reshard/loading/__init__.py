"""Into the tensors of a running job: who wants what, who reads it, who sends it."""
