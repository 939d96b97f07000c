"""The measured times of steps and copies, and the choices that depend on them."""
