"""Structured output: from a structure that a client asks for to a grammar, and to masks.

A structure becomes a grammar of our own words (`expressions`), is written in xgrammar's EBNF and
compiled by xgrammar in a process that may be killed. Another makes the masks. Neither the serving
process nor a rank imports xgrammar.
"""
