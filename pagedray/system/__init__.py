"""What processes and threads read and set of their operating system."""
