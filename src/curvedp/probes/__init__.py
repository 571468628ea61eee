"""Inputs and labels from which curvature is found without looking at private data.

A :class:`Probe` makes inputs, a :class:`LabelRule` labels, and :func:`draw` joins them.
All of them draw from the generator that they are given and from nothing else.
"""
