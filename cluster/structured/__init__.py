"""Structured output: from a structure that a client asks for to a grammar, and to masks.

A structure becomes a grammar of our own words (`expressions`), is written in xgrammar's EBNF and
compiled by xgrammar in a process that may be killed. xgrammar is imported where it is first used,
and never by a rank.
"""
