"""What steps and copies take, as measured, and which way to preempt a sequence costs less."""
