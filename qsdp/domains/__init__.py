"""`qsdp domains`: does training with quantized weights help on data from elsewhere (QT-DoG)?"""
