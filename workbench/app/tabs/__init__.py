"""The tabs of the page, one file each; they share the state and do not depend on each other."""
