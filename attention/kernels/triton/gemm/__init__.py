"""GEMMs and GEMVs: of a few rows, and with weights in fp8 and int4."""
