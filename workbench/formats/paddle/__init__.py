"""PaddlePaddle: ``paddle.save``, ``paddle.distributed`` and PaddleNLP."""
