"""WHERE: which columns a rank's rows meet, and how they come here."""
