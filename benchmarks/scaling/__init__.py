"""Every way of using several devices: measured, modelled, drawn."""
