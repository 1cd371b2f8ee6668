"""Settings for a load: what `peagle bench` measured, turned into a recommendation and a file. Imports no torch."""
