"""The division of a step's decodes among the programs of a GPU."""
