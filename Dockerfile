# An image that trains: docs/containers.md. For GPUs, pass the index of torch with CUDA:
#   docker build -t meshwright:gpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
FROM python:3.11-slim
# torch.compile calls a compiler, on CPUs as on GPUs
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir torch==2.13.0 --index-url ${TORCH_INDEX}
WORKDIR /opt/meshwright
COPY . .
RUN pip install --no-cache-dir --constraint requirements.txt .
WORKDIR /work
ENTRYPOINT ["meshwright"]
