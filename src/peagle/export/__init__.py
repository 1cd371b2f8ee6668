"""Handing drafters over to other engines: writing their directories, and checking what was written."""
