#!/bin/sh
# Two pods of a kind cluster talk by RDMA: try.sh DIRECTORY, where the archive anyverbs-*-linux-gnu.tar.gz was unpacked.
# Needs docker, kind, kubectl and sudo. It leaves /opt/anyverbs and /etc/cdi/anyverbs.json.
set -eu

unpacked=$(cd "${1:?usage: try.sh DIRECTORY of the unpacked archive}" && pwd)
cd "$(dirname "$0")"
sudo "$unpacked/install.sh" --prefix /opt/anyverbs
sudo /opt/anyverbs/bin/anyverbs cdi --output /etc/cdi/anyverbs.json

docker build --tag rdma-programs:local .
kind create cluster --name anyverbs --config kind.yaml
trap 'kind delete cluster --name anyverbs' EXIT
kind load docker-image rdma-programs:local --name anyverbs

# The engine of a node lends the device by its name.
docker exec anyverbs-worker ctr --namespace k8s.io run --rm --net-host --device anyverbs/rdma=anyverbs0 \
    docker.io/library/rdma-programs:local lent ibv_devinfo

kubectl --context kind-anyverbs apply --filename pods.yaml
kubectl --context kind-anyverbs wait --for 'jsonpath={.status.phase}=Succeeded' --timeout 120s pod/rdma-client pod/rdma-server
kubectl --context kind-anyverbs logs rdma-client
