"""Passes that a rank without inputs makes with the others, in DDP's join(), and their residuals."""

import functools


def patch(cls, attachment_of):
    """Wraps what DDP calls there. attachment_of: a model's, or None."""
    match, match_unused = cls._match_all_reduce_for_bwd_pass, cls._match_unused_params_allreduce

    @functools.wraps(match)
    def _match_all_reduce_for_bwd_pass(self):
        attachment = attachment_of(self)
        if attachment is not None:
            attachment.endpoint.steps.without_optimizer(attachment.model)
        return match(self)

    @functools.wraps(match_unused)
    def _match_unused_params_allreduce(self):
        attachment = attachment_of(self)
        if attachment is None or attachment.unused is None:
            return match_unused(self)
        used = self.reducer._get_local_used_map()
        self.process_group.allreduce(used).wait()  # which torch does not do, for it has no use for the sum
        keys = [key for _, _, key in attachment.keyed_parameters()]  # in the reducer's order
        dropped = [key for key, ranks in zip(keys, used.tolist()) if not ranks]
        attachment.endpoint.steps.give_back(attachment.model, dropped)
        return None

    cls._match_all_reduce_for_bwd_pass = _match_all_reduce_for_bwd_pass
    cls._match_unused_params_allreduce = _match_unused_params_allreduce
