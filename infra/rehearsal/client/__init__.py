"""The user of the rehearsal: sends chat requests to the gateway the whole time, and counts what goes wrong."""
