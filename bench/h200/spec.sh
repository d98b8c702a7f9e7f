# NextN on one H200, about 6 minutes cold. $OUT: results. The environment is ../shared/gpu/README.md's.
python3 -m bench.serve.make_nextn /tmp/nextn
AB="python3 -m bench.serve.spec_ab --tool $HOME/p/tools/serve_ab.py"
# first what must be equal: dummy weights with 3 drafted tokens, and the checkpoint with 1
timeout 300 $AB --boot 240 nextn-dummy nextn-one > $OUT/spec1.log 2>&1; grep -v '^{' $OUT/spec1.log | tail -30
# then the accepted length with 3
timeout 240 $AB --boot 200 --out spec2.json nextn-three > $OUT/spec2.log 2>&1; grep -v '^{' $OUT/spec2.log | tail -20
grep -l -E "Traceback|Error" $OUT/*.log
