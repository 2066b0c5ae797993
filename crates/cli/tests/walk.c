/* Walks the devices as programs do that choose a NIC, and prints a line for each: its name, PCI address and NUMA node, and the GID
   index that NCCL and Mooncake take.

   NCCL goes from the device's link in sysfs to its PCI address, back by the bus, and up to the root port. It takes a GID of RoCE v2
   that is IPv4 and not link-local, and reads the type in sysfs. Mooncake takes the first GID of RoCE v2 that is IPv4.

   With a number it makes an address handle with the GID of that index, and says how that ends. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NEED(cond)                                                              \
	do {                                                                    \
		if (!(cond)) {                                                  \
			fprintf(stderr, "line %d: %s\n", __LINE__, #cond);      \
			exit(1);                                                \
		}                                                               \
	} while (0)

static const char *text(const char *dir, const char *file)
{
	static char line[4][256];
	static int n;
	char path[PATH_MAX + 64], *into = line[n++ % 4];
	snprintf(path, sizeof path, "%s/%s", dir, file);
	FILE *f = fopen(path, "r");
	if (!f)
		return "";
	into[0] = 0;
	NEED(fgets(into, sizeof line[0], f));
	fclose(f);
	into[strcspn(into, "\n")] = 0;
	return into;
}

static int is_ipv4(const union ibv_gid *gid)
{
	static const unsigned char mapped[12] = { [10] = 0xff, [11] = 0xff };
	return !memcmp(gid->raw, mapped, sizeof mapped);
}

static int nccl(struct ibv_context *ctx, const char *name, int count)
{
	for (int i = 0; i < count; i++) {
		char dir[256], file[16];
		union ibv_gid gid;
		NEED(ibv_query_gid(ctx, 1, i, &gid) == 0);
		snprintf(dir, sizeof dir, "/sys/class/infiniband/%s/ports/1/gid_attrs/types", name);
		snprintf(file, sizeof file, "%d", i);
		if (is_ipv4(&gid) && !strcmp(text(dir, file), "RoCE v2"))
			return i;
	}
	return -1;
}

static int mooncake(struct ibv_context *ctx, int count)
{
	for (int i = 0; i < count; i++) {
		struct ibv_gid_entry entry;
		if (ibv_query_gid_ex(ctx, 1, i, &entry, 0) == 0 && is_ipv4(&entry.gid) && entry.gid_type == IBV_GID_TYPE_ROCE_V2)
			return i;
	}
	return -1;
}

static void pci(const char *name)
{
	char link[256], path[PATH_MAX], again[PATH_MAX], bus[PATH_MAX];
	snprintf(link, sizeof link, "/sys/class/infiniband/%s/device", name);
	NEED(realpath(link, path));
	const char *address = strrchr(path, '/') + 1;
	if (strstr(path, "/virtual/")) {
		printf("%s virtual %s", name, text(path, "numa_node"));
		return;
	}
	NEED(!strcmp(text(path, "class"), "0x020000"));
	snprintf(bus, sizeof bus, "/sys/class/pci_bus/%.7s/../../%s", address, address);
	NEED(realpath(bus, again) && !strcmp(path, again));
	snprintf(bus, sizeof bus, "/sys/bus/pci/devices/%s", address);
	NEED(realpath(bus, again) && !strcmp(path, again));
	NEED(strstr(text(path, "max_link_speed"), "GT/s PCIe") && strstr(text(path, "../max_link_speed"), "GT/s PCIe"));
	NEED(atoi(text(path, "max_link_width")) == 16 && atoi(text(path, "../max_link_width")) == 16);
	NEED(!strcmp(text(path, "../class"), "0x060400"));
	NEED(text(path, "local_cpus")[0] && text(path, "local_cpulist")[0]);
	snprintf(bus, sizeof bus, "%s/driver", path);
	NEED(realpath(bus, again));
	unsigned char config[64];
	snprintf(bus, sizeof bus, "%s/config", path);
	FILE *f = fopen(bus, "r");
	NEED(f && fread(config, 1, sizeof config, f) == sizeof config);
	fclose(f);
	NEED((config[0] | config[1] << 8) == strtol(text(path, "vendor"), NULL, 0));
	printf("%s %s %s:%s %s %s", name, address, text(path, "vendor"), text(path, "device"), strrchr(again, '/') + 1, text(path, "numa_node"));
}

static int handle(struct ibv_device *device, int index)
{
	struct ibv_context *ctx = ibv_open_device(device);
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = index, .hop_limit = 64 } };
	NEED(ctx && ibv_query_gid(ctx, 1, index, &attr.grh.dgid) == 0);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	NEED(pd);
	puts(ibv_create_ah(pd, &attr) ? "made" : strerror(errno));
	return 0;
}

int main(int argc, char **argv)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	NEED(n > 0);
	if (argc > 1)
		return handle(list[0], atoi(argv[1]));
	for (int i = 0; i < n; i++) {
		const char *name = ibv_get_device_name(list[i]);
		struct ibv_context *ctx = ibv_open_device(list[i]);
		struct ibv_port_attr port;
		NEED(ctx && ibv_query_port(ctx, 1, &port) == 0);
		pci(name);
		char dir[256];
		snprintf(dir, sizeof dir, "/sys/class/infiniband/%s/ports/1", name);
		printf(" %s nccl %d mooncake %d\n", text(dir, "rate"), nccl(ctx, name, port.gid_tbl_len), mooncake(ctx, port.gid_tbl_len));
	}
	return 0;
}
