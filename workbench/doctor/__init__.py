"""Why a loss jumps after a resume: facts, exact laws of the optimizer, and the rules that apply them."""
