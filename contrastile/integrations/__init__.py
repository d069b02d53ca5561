"""Adapters: the losses and the gradient cache inside the trainers of other libraries, one file for each library.

An adapter may import anything of this package; nothing of this package imports an adapter. Importing one loads torch
and this package only, its library where it is first used.
"""
