// Uses a device only if its node is there, as some programs do.
#include <assert.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	for (int i = 0; i < 3; i++) {
		int n;
		struct ibv_device **list = ibv_get_device_list(&n);
		assert(list && n == 1);
		char node[100];
		snprintf(node, sizeof node, "/dev/infiniband/%s", list[0]->dev_name);
		if (access(node, F_OK) != 0)
			printf("no %s\n", node);
		ibv_free_device_list(list);
	}
	return 0;
}
