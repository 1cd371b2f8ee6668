ray start --head --port=$ray_port
until python3 -c 'import ray, sys; ray.init(address="auto", logging_level="ERROR"); sys.exit(sum(node["Alive"] for node in ray.nodes()) < $num_nodes)'; do
  echo "waiting for $num_nodes nodes"; sleep 5
done
exec $command
