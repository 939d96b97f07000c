"""What a step computes: who decodes, which prompts, and who is preempted for whom."""
