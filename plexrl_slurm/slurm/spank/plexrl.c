/*
 * sbatch --plexrl-model=NAME[,NAME...]: declares models as "#PLEXRL --model" lines do.
 *
 * Build on the site, with its own Slurm's headers, then name it in plugstack.conf:
 *   gcc -O2 -Wall -Wextra -shared -fPIC -o plexrl_spank.so plexrl.c
 *   optional /etc/slurm/plexrl_spank.so
 * It only hands the names on; job_submit.lua checks them and marks the job.
 */
#include <slurm/spank.h>
#include <stdlib.h>
#include <string.h>

SPANK_PLUGIN(plexrl, 1);

static char *models;

static int take(int value, const char *text, int remote)
{
	size_t had = models ? strlen(models) : 0;
	char *longer;

	(void)value;
	if (remote) /* the compute node gets it too, and has no use for it */
		return ESPANK_SUCCESS;
	if (!text || !*text) {
		slurm_error("plexrl: --plexrl-model needs a name");
		return -1;
	}
	longer = realloc(models, had + strlen(text) + 2);
	if (!longer)
		return -1;
	if (had)
		longer[had++] = ',';
	strcpy(longer + had, text);
	models = longer;
	return ESPANK_SUCCESS;
}

static struct spank_option option = {
	.name = "plexrl-model",
	.arginfo = "NAME",
	.usage = "a model of the PlexRL partition that the job will use; repeatable",
	.has_arg = 1,
	.val = 0,
	.cb = take,
};

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
	(void)argc;
	(void)argv;
	return spank_option_register(spank, &option);
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv)
{
	(void)argc;
	(void)argv;
	if (!models || spank_context() == S_CTX_REMOTE)
		return ESPANK_SUCCESS;
	return spank_job_control_setenv(spank, "PLEXRL_MODEL", models, 1);
}
