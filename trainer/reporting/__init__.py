"""The picture of a run: from the files in its folder to one page of HTML."""
