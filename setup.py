"""Kept for tools that still call it; everything is in setup.cfg."""

from setuptools import setup

setup()
