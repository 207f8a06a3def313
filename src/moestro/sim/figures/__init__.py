"""Figures of simulations: outcomes, intervals, tables and plots."""
