"""Exchanges: the columns that meet a rank's rows, and their way from rank to rank."""
