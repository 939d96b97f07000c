"""Structured output: compiles the structures of clients to grammars, and makes token masks.

`grammar` converts a structure to expressions and to xgrammar's EBNF. `compiler_process` compiles it
with xgrammar in a process that may be killed, and `mask_process` makes the masks in another
process. Neither the serving process nor a rank imports xgrammar.
"""
