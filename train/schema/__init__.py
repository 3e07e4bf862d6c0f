"""`jgt schema`: the JSON Schemas of run files and rules files, with which editors complete and check them."""
