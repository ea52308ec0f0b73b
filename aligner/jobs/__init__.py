"""What runs do, by the kind of their recipe: train on data, learn from samples, write data, serve a model. `start` has the job of each."""
