"""Device code: functions that Triton compiles, launched by the modules of the drawer above."""
