# make check | test [ARGS=tests/unit] | proof [ARGS=CONFIG] | pages | docs
SHELL := bash
RUN := source scripts/environment.sh && prepare_environment test && export PYTHONPATH=$$PWD &&

.PHONY: check test proof pages docs

check: # lint, format, types; sizes are only printed
	$(RUN) $$python -m ruff check . && $$python -m ruff format --check . && $$python -m mypy && \
		$$python -m scripts.sizes

test:
	./run_tests.sh $(ARGS)

proof:
	$(RUN) $$python -m meshwright prove $(or $(ARGS),debug_model)

pages: # the files made from the code
	$(RUN) $$python -m scripts.project_links
	$(RUN) $$python -m scripts.config_reference > docs/config_reference.md
	$(RUN) $$python -m scripts.command_reference > docs/commands.md
	$(RUN) $$python -m meshwright schema > train_configs/schema.json
	$(RUN) $$python -m scripts.draw_house > docs/images/house.svg
	$(RUN) for name in job pieces; do $$python -m scripts.draw_diagrams $$name > docs/images/$$name.svg; done

docs: pages # and the site
	scripts/build_site.sh
